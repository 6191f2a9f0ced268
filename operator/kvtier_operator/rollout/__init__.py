"""Release control: the machine that walks a candidate from Shadow to Full, or back to the exact baseline."""
