"""What is compared: an experiment a module, its runs, its table and its figures."""
