"""How the moves of a minibatch run on a device: precision, CUDA graphs, compilation, kernels."""
