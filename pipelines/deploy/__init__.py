"""From a repository to a cluster: container images and Kubernetes manifests. Runs nothing but docker or podman."""
