"""Commands by their former names: `python -m experiments.train` is `mbx train`."""
