"""The exceptions of this package.

    QwenEditError                exit status 1
    |-- UserError                exit status 2: something the user gave cannot work; message only, never a traceback
    |   |-- SettingsError        recipe, override, command line or DeepSpeed JSON
    |   |-- ModelFolderError     the model folder is missing, incomplete or of another family
    |   |-- DataError            manifest, picture or cache
    |   |-- ClusterError         launcher, hostfile, ranks, devices
    |   `-- CheckpointError      a checkpoint that is missing, damaged or does not fit this run
    `-- RunError                 exit status 1: the run itself cannot go on
        |-- DivergenceError      loss or gradients stayed non-finite
        |-- FencedError          a newer run has taken over the run folder
        `-- StorageError         disk full, folder vanished or read-only while running

A run that was asked to end, and saved, ends with START_AGAIN.

Every message says what was found, where (file, line, key, rank), why it cannot be, and what to do.
"""

START_AGAIN = 75  # exit status EX_TEMPFAIL: nothing is wrong with the run; the same command goes on


class QwenEditError(Exception):
    """Base of all errors raised on purpose by this package."""

    exit_status = 1


class UserError(QwenEditError):
    """Something the user gave cannot work; shown as a plain message."""

    exit_status = 2


class SettingsError(UserError):
    """A recipe, an override, the command line or a DeepSpeed JSON is wrong."""


class ModelFolderError(UserError):
    """The model folder is missing, incomplete or holds a model of another family."""


class DataError(UserError):
    """A manifest, a picture or a cache entry cannot be used."""


class ClusterError(UserError):
    """The launcher, the hostfile, the ranks or the devices contradict each other."""


class CheckpointError(UserError):
    """A checkpoint is missing, damaged or does not fit this run."""


class RunError(QwenEditError):
    """The run itself cannot go on."""


class DivergenceError(RunError):
    """The loss or the gradients stayed non-finite."""


class StorageError(RunError):
    """Writing failed: disk full, folder vanished or read-only."""


class FencedError(RunError):
    """Another start has taken over the run folder; this one may write nothing into it any more."""
