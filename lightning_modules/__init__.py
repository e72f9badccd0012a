"""The variable-normalization transformer, its objective and the LightningModule around it."""
