"""Every error this project raises on purpose, in one tree.

A volunteer must never see a traceback, so each error carries what went wrong and what to do about
it; the command lines print exactly that one line and exit with `exit_code`.

SwarmError
├── ConfigError          run.toml or a flag is wrong
│   └── PipelineError    the model cannot be cut as asked
├── DataError            data is missing, unreadable or not the bytes the run names
├── JoinError            no swarm at that address, another run, a stage too large for this peer
│   └── VersionError     the other side speaks another protocol version
├── DeviceError          no such device, or no memory left on this one
├── StorageError         a file cannot be written: disk full, no permission, locked
├── ListenError          a port cannot be opened
├── WireError            bytes from a peer break the protocol (never fatal to a process)
├── TransportError       a connection failed
│   ├── UnreachableError   could not be dialled
│   └── StreamClosedError  ended, cut, or silent for too long
├── RefusedError         a peer answered "no", with the reason (stale term, fenced, wrong step)
└── StageFailedError     a stage's computation raised
    └── NotFiniteError     it made NaN or infinity of numbers (swarm.finite)
"""

from __future__ import annotations


class SwarmError(Exception):
    """Base of all. `remedy` says what the reader can do; empty when there is nothing to do."""

    exit_code = 1

    def __init__(self, message: str, remedy: str = "") -> None:
        super().__init__(message)
        self.message = message
        self.remedy = remedy

    def __str__(self) -> str:
        return f"{self.message} - {self.remedy}" if self.remedy else self.message


class ConfigError(SwarmError):
    exit_code = 2


class PipelineError(ConfigError):
    pass


class DataError(SwarmError):
    exit_code = 3


class JoinError(SwarmError):
    exit_code = 4


class VersionError(JoinError):
    pass


class DeviceError(SwarmError):
    exit_code = 5


class StorageError(SwarmError):
    exit_code = 6


class InUseError(StorageError):
    """Another process uses it."""


class ListenError(SwarmError):
    exit_code = 7


class WireError(SwarmError):
    pass


class TransportError(SwarmError):
    pass


class UnreachableError(TransportError):
    pass


class StreamClosedError(TransportError):
    pass


class RefusedError(SwarmError):
    pass


class StageFailedError(SwarmError):
    pass
