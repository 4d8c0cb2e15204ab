"""Find the first stage of a deployment that answers wrongly, and there the layer and the tensor."""
