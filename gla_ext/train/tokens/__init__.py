"""Corpora of tokens on the disk, as `python -m gla_ext.train.prepare` writes them: how a run reads
them.
"""
