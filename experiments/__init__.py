"""The composition root: the command line, its configs, and one module per extra verb."""
