"""`python -m bench.gpu_check`: kernels, tokens and speed on one GPU, without any network.

`kernels` compares every kernel of every backend with float64, `stages` the tokens of the four servers, `steps`
what graphs and overlap are worth, `rates` the model's throughput with what the card can do at best.
"""
