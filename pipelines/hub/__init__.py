"""The only door to the Hugging Face Hub: a repository at one commit in, a folder of verified files out."""

from pipelines.hub.download import download_dataset, download_model
from pipelines.hub.source import HubSnapshot, HubSource

__all__ = ["HubSnapshot", "HubSource", "download_dataset", "download_model"]
