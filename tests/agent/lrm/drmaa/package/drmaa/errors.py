"""The errors that tests raise, including the package's error for missing usage data."""


class DrmaaException(Exception):
    pass


def _error(name):
    return type(name, (DrmaaException,), {})


InvalidJobException = _error("InvalidJobException")
ExitTimeoutException = _error("ExitTimeoutException")
DeniedByDrmException = _error("DeniedByDrmException")
DrmCommunicationException = _error("DrmCommunicationException")
TryLaterException = _error("TryLaterException")
_ERRORS = [Exception]
