"""Gates on metrics of other systems: where they are read, and what a reading is worth."""
