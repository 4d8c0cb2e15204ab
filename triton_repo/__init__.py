"""Generate Triton model repositories: typed settings in, a folder that tritonserver can serve out."""
