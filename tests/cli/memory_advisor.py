"""An advisor with runs and placements in lists."""

from koalapy.daemon.forecast.advisor import Advisor
from koalapy.model.advice import AdvisedPlacement, Run
from koalapy.scheduler.advisor.experience import Experience


class MemoryAdvisor:
    def __init__(self) -> None:
        self.experience = Experience()
        self.advised: list[AdvisedPlacement] = []
        self.advisor = Advisor(self.experience, self)

    def record(self, application: str, limit: int, owner: str | None = None) -> list[AdvisedPlacement]:
        return [placement for placement in self.advised if application in ("", placement.application)][:limit]

    def applications_of(self, owner: str) -> set[str]:
        raise AssertionError("for users only")

    def runs(self, limit: int) -> list[Run]:
        return []
