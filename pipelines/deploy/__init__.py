"""Deploy a repository: container images, Kubernetes manifests, cluster scripts. Runs only docker or podman."""
