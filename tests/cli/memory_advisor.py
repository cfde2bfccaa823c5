"""An advisor with runs, placements and predictions in lists."""

from collections.abc import Sequence

from koalapy.daemon.forecast.track_record import Advisor, TrackRecord
from koalapy.model.advice import AdvisedPlacement, Run
from koalapy.model.prediction import Course, Prediction
from koalapy.scheduler.advisor.experience import Experience


class MemoryAdvisor:
    def __init__(self) -> None:
        self.experience = Experience()
        self.advised: list[AdvisedPlacement] = []
        self.outcomes: list[tuple[Prediction, Course]] = []
        self.now = 1000.0
        self.advisor = Advisor(self.experience, self, TrackRecord(self, self, lambda: self.now))

    def record(self, application: str, limit: int, owner: str | None = None) -> list[AdvisedPlacement]:
        return [placement for placement in self.advised if application in ("", placement.application)][:limit]

    def applications_of(self, owner: str) -> set[str]:
        raise AssertionError("for users only")

    def add_predictions(self, predictions: Sequence[Prediction]) -> None:
        raise AssertionError("nothing is foretold here")

    def predictions(
        self, since: float, limit: int, owner: str | None = None, application: str = ""
    ) -> list[tuple[Prediction, Course]]:
        return self.outcomes

    def runs(self, limit: int) -> list[Run]:
        return []
