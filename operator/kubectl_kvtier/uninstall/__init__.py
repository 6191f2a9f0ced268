"""`kubectl kvtier uninstall`: every object of ours goes, and no wait is without an end."""
