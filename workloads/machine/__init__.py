"""What both engines ask of the machine: memory limits, and files that are read and written past the page cache."""
