"""Logs of multi-agent systems as transcripts.

`read_transcripts` reads files of chats, traces and labeled runs, and yields `Transcript` records. Lines that cannot be
read as transcripts are reported individually, and all other lines are read.
"""

from typing import TYPE_CHECKING

from mas_gym.internal.lazy import lazy_names

if TYPE_CHECKING:
    from mas_gym.logs.reader import FORMATS as FORMATS
    from mas_gym.logs.reader import read_transcripts as read_transcripts
    from mas_gym.logs.reader import recognize as recognize
    from mas_gym.logs.transcript import BrokenLine as BrokenLine
    from mas_gym.logs.transcript import LoggedMessage as LoggedMessage
    from mas_gym.logs.transcript import Transcript as Transcript
    from mas_gym.systems.tool_calls import ToolCall as ToolCall

__getattr__, __dir__, __all__ = lazy_names(__name__)
