"""What models are made of: tensor-parallel layers, rotary angles, the sampler."""
