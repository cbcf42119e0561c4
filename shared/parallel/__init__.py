"""Tensor parallelism: what each rank holds (`partition`) and how ranks talk (`tp_group`)."""
