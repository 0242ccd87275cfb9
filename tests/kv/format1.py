"""Format 1, as older versions wrote it: keys, values and prior, one checksum over all."""

import json
import struct

import torch
import xxhash

NAMES = {torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16"}


def encode(key, kv):
    tensors = {"keys": kv.keys, "values": kv.values}
    if kv.prior is not None:
        tensors["prior"] = kv.prior
    fields, body = {}, b""
    for name, tensor in tensors.items():
        raw = tensor.contiguous().view(-1).view(torch.uint8).numpy().tobytes()
        offsets = [len(body), len(body) + len(raw)]
        fields[name] = {
            "dtype": NAMES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": offsets,
        }
        body += raw
    metadata = {
        "format": "cacheblend-rag/1",
        "key": str(key),
        "fingerprint": key.fingerprint,
        "position": str(kv.position),
        "tokens": str(kv.tokens),
    }
    metadata["checksum"] = checksum(metadata, fields, body)
    text = json.dumps({"__metadata__": metadata, **fields}, separators=(",", ":")).encode()
    text += b" " * (-(8 + len(text)) % 64)
    return struct.pack("<Q", len(text)) + text + body


def checksum(metadata, tensors, body):
    essential = {n: v for n, v in sorted(metadata.items()) if n != "checksum"}
    tensors = {n: f for n, f in sorted(tensors.items()) if n != "__metadata__"}
    shapes = [[n, f["dtype"], *f["shape"]] for n, f in tensors.items()]
    digest = xxhash.xxh3_128(json.dumps([essential, shapes]).encode())
    for field in tensors.values():
        digest.update(body[slice(*field["data_offsets"])])
    return digest.hexdigest()
