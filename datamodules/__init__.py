"""Codec-token shards, the position-addressed stream over them, and the LightningDataModule."""
