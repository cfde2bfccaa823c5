"""The errors that tests raise, and the package's way to tell of "no usage"."""


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
