"""Quotas of files kept on the daemon's disk, and the limits of users with their use."""

from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace

from koalapy.daemon.jobs.share_weights import ShareWeights
from koalapy.model.errors import FullError
from koalapy.model.identity import Identity, Role
from koalapy.model.limits import NAMES, Limits, Scope, ShareLine
from koalapy.model.wording import format_bytes
from koalapy.scheduler.owner_use import OwnerUse


@dataclass(frozen=True, slots=True)
class StorageLimits:
    """The largest size of one archive and of all archives of its kind, in bytes."""

    archive: int
    quota: int


@dataclass(frozen=True, slots=True)
class StorageUse:
    """The stored bytes of one kind of files and their quota."""

    used: int
    limit: int


class Quota:
    """The limit of one kind of files, with those that are still being received."""

    def __init__(
        self,
        setting: str,
        limit: int,
        used: int,
        remove_files: Callable[[Callable[[], int]], Awaitable[None]],
        rejection_reason: str,
    ) -> None:
        """Call ``remove_files`` with a function that counts the bytes over the quota, when there would be some.

        ``rejection_reason`` says why files remain.
        """
        self._setting = setting
        self._limit = limit
        self.used = used
        """Bytes of files that are stored or being received."""
        self._remove_files = remove_files
        self._rejection_reason = rejection_reason

    @property
    def use(self) -> StorageUse:
        return StorageUse(self.used, self._limit)

    @contextmanager
    def hold_space(self) -> Iterator["QuotaHold"]:
        """Count a file while it is received, and stop counting it at the end unless ``keep_bytes`` was called."""
        hold = QuotaHold(self)
        try:
            yield hold
        finally:
            self.used -= hold.size

    async def free_space(self, size: int = 0) -> None:
        """Remove files until ``size`` more bytes fit. Raise ``FullError`` if they still do not fit."""

        def count_excess() -> int:
            return self.used + size - self._limit

        if count_excess() > 0:
            await self._remove_files(count_excess)
        if count_excess() > 0:
            raise FullError(
                f"the daemon's storage is full: {self._setting} is {format_bytes(self._limit)}, and "
                f"{self._rejection_reason}",
                field="body",
                hint=f"try again later, or ask the daemon's operator to raise {self._setting}",
            )


class QuotaHold:
    """The bytes that one file takes while it is received."""

    def __init__(self, quota: Quota) -> None:
        self._quota = quota
        self.size = 0

    async def add_bytes(self, size: int) -> None:
        """Count ``size`` more bytes. Raise ``FullError`` if they do not fit."""
        await self._quota.free_space(size)
        self._quota.used += size
        self.size += size

    def keep_bytes(self, replaced_size: int = 0) -> None:
        """Count the received file as stored for good; it replaces files of ``replaced_size`` bytes."""
        self._quota.used -= replaced_size
        self.size = 0


@dataclass(frozen=True, slots=True)
class LimitInUse:
    """A limit and its use; ``used`` is None where use is not counted, as of the size of one request."""

    name: str
    limit: float
    used: float | None


@dataclass(frozen=True, slots=True)
class ScopeInUse:
    """The limits of a user, or of one of the user's groups."""

    kind: str
    name: str
    limits: Sequence[LimitInUse]


@dataclass(frozen=True, slots=True)
class LimitsInUse:
    """Reports the limits that apply to a user, with their use."""

    owner_use: OwnerUse
    bundle_bytes: Callable[[Scope], Awaitable[int]]
    result_bytes: Callable[[Scope], Awaitable[int]]
    clock: Callable[[], float]
    weights: ShareWeights

    @property
    def limits(self) -> Limits:
        return self.owner_use.limits

    def read_shares(self, caller: Identity) -> list[ShareLine]:
        """Return the use of groups and users compared with their weights, in the order of their waiting jobs; empty
        without fair shares. Users without use follow if their weight was set. Other users are for operators only."""
        if self.owner_use.shares is None:
            return []
        unused, sees_all = dict(self.weights.by_user), caller.has_role(Role.OPERATOR)
        lines = [replace(s, set_weight=unused.pop(s.user, None)) for s in self.owner_use.shares.lines(self.clock())]
        lines += [ShareLine(user, "", w.weight or 0.0, 0.0, 0.0, 0.0, 0, w) for user, w in unused.items()]
        return [line for line in lines if sees_all or line.user in ("", caller.user)]

    async def read_limits(self, user: str) -> Sequence[ScopeInUse]:
        """Return the limits that apply to a user, each with its current use."""
        scopes = []
        for scope in self.limits.scopes(user):
            used: dict[str, float] = {**self.owner_use.current_use(scope, self.clock())}
            used["bundle_bytes"] = await self.bundle_bytes(scope)
            if scope.limits.result_bytes is not None:
                used["result_bytes"] = await self.result_bytes(scope)
            limits = ((name, getattr(scope.limits, name)) for name in NAMES)
            in_use = [LimitInUse(name, limit, used.get(name)) for name, limit in limits if limit is not None]
            scopes.append(ScopeInUse(*scope.key, in_use))
        return scopes
