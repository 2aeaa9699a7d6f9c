"""Floor 13: proof that paths and backends agree, for this repository and for third parties."""
