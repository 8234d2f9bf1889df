"""The paper's experiments at a small size: what each found is in docs/experiments.md.

`python -m experiments.text` prepares the text, `python -m experiments.run` trains what is still to
be trained, `python -m experiments.report` draws the figures and tables from the results.
"""
