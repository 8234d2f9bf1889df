"""What a training run on several processes adds."""
