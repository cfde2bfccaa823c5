"""An advisor in memory: the test says what ran, and what was advised."""

from koalapy.model.advice import Advised, Run
from koalapy.scheduling.advisor.experience import Experience
from koalapy.service.advisor import Advisor


class MemoryAdvisor:
    """The real advisor, with a store that is a list."""

    def __init__(self) -> None:
        self.experience = Experience()
        self.advised: list[Advised] = []
        self.advisor = Advisor(self.experience, self)

    def record(self, application: str, limit: int, owner: str | None = None) -> list[Advised]:
        return [given for given in self.advised if application in ("", given.application)][:limit]

    def applications_of(self, owner: str) -> set[str]:
        raise AssertionError("for users only")

    def runs(self, limit: int) -> list[Run]:
        return []
