"""What a training run writes beside its checkpoint."""
