"""The Triton model repository: typed settings in, a folder that tritonserver serves out."""
