"""Who learns from transfers: the catalogue which replicas are spoiled, the network how fast its links are."""

from koalapy.scheduling.events import Event
from koalapy.service.files import Files
from koalapy.service.network import Network


class TransferFeedback:
    """Passes on what agents tell of transfers that are over (``hub.Feedback``)."""

    def __init__(self, files: Files, network: Network) -> None:
        self._files = files
        self._network = network

    def moved(self, source: str, target: str, size: int, seconds: float) -> None:
        self._network.transferred(source, target, size, seconds)

    def spoiled(self, file: str, cluster: str, error: str) -> tuple[Event, ...]:
        return self._files.spoiled(file, cluster, error)
