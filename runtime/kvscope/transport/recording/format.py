"""What a recording looks like inside, shared by the one who writes and the one who reads.

header    profile "kvscope"
metadata  "kvscope": kvscope_version, schema_version
chunks    zstd with CRC; messages in batch order:
            channel "keyframe"  a full state: first if recording began in mid-life, or where a batch was too large
            channel "packed"    one batch: `packing` says how to unpack it. It is then as on the wire; or, of many
                                events, field by field: `events.transposed` says how
            channel "events"    one batch, as on the wire: those that are too large for the other channel
            channel "checkpoint"  now and then, the state after the batch before it, to start a look back from: what
                                  differs from an earlier one, or all of it
            channel "bookmark"  a moment that somebody has marked, with a note, wherever in the file it came to be
attach    "kvscope.index": what `columns` describes, in parts
message   sequence = the batch's number modulo 2**32, log_time = wall clock in ns
"""

PROFILE = "kvscope"
METADATA_NAME = "kvscope"
EVENTS_CHANNEL = "events"
PACKED_CHANNEL = "packed"
KEYFRAME_CHANNEL = "keyframe"
CHECKPOINT_CHANNEL = "checkpoint"
BOOKMARK_CHANNEL = "bookmark"
BATCH_CHANNELS = EVENTS_CHANNEL, PACKED_CHANNEL
INDEX_NAME = "kvscope.index"
MESSAGE_ENCODING = "msgpack"

SEQUENCE_MODULUS = 1 << 32  # MCAP's message sequence has 32 bits
CHUNK_BYTES = 1 << 18
MAX_KEYFRAME_BYTES = 64 << 20
MAX_CHUNK_BYTES = 96 << 20  # a keyframe, a batch, and what was in the chunk before


class RecordingError(ValueError):
    """The recording cannot be written or read. One line with the path."""
