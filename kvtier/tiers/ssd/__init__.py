"""The SSD tier: one data file and a journal that says what is where."""
