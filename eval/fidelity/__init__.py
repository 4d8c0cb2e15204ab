"""Fidelity: how close the predictions of a compressed model are to those of the 16-bit model, token by token."""
