"""Every error that batchgen raises on purpose. The CLI prints the message as one line; only `--debug` shows a traceback.

    BatchgenError                 exit code 1    something in batchgen or on the machine went wrong
    ├── UsageError                exit code 2    the job cannot start as asked
    │   ├── JobFileError                         a key or value of the job file, or of --set
    │   ├── InputError                           no files match, a missing column, an unreadable file
    │   ├── ModelError                           model, tokenizer or chat template missing, unreadable or unsupported
    │   └── RunFolderError                       the output folder is locked or belongs to another job
    ├── CorruptRunError           exit code 1    a committed file is missing or damaged
    ├── EngineError               exit code 1    the engine cannot go on: no memory for one token, every step fails
    └── TooManyFailedRows         exit code 4    the error budget is spent
    Interrupted                   exit code 75   stopped by a signal; run the same command again to go on

A fault of one row is not an exception that travels: it is a `RowFault` (records.py) in that row's answer.
"""


class BatchgenError(Exception):
    """Base of all expected failures. The message says what is wrong, where, and what to do."""

    exit_code = 1


class UsageError(BatchgenError):
    exit_code = 2


class JobFileError(UsageError):
    pass


class InputError(UsageError):
    pass


class ModelError(UsageError):
    pass


class RunFolderError(UsageError):
    pass


class CorruptRunError(BatchgenError):
    pass


class EngineError(BatchgenError):
    pass


class TooManyFailedRows(BatchgenError):
    exit_code = 4


class Interrupted(BaseException):
    """Not an Exception: like KeyboardInterrupt it comes up anywhere, and no `except Exception` (a template's, a tokenizer's,
    a library's) may take it for a fault of what it happened to interrupt."""

    exit_code = 75

    def __init__(self, message: str = "", signal: str = "") -> None:
        super().__init__(message)
        self.signal = signal  # its name, such as "TERM"; "" if it was none
        self.num_answered: int | None = None  # by this process, if it is a worker of several
