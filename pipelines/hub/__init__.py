"""All access to the Hugging Face Hub: turn a repository at one commit into a folder of verified files."""

from pipelines.hub.download import download_dataset, download_model, stated, why_not
from pipelines.hub.faults import HubSnapshot, HubSource

__all__ = ["HubSnapshot", "HubSource", "download_dataset", "download_model", "stated", "why_not"]
