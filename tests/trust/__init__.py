"""Random attention programs, perturbed graphs and the oracle that judges what the pass made of them."""
