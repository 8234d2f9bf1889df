"""Makes a corpus of tokens from text of any size: `python -m gla_ext.train.prepare`."""
