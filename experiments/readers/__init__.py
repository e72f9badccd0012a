"""One file per log format: each turns a training log into a :class:`~experiments.readers.table.LogTable`."""
