#!/bin/bash
# tritonclient 2.73.0 drops its own channel options where channel_args is given.
#
# Without channel_args, InferenceServerClient opens its channel with unlimited message sizes (-1). With any channel_args,
# even one that is not about sizes, these options are gone and gRPC's own limit of 4 MiB for received messages holds.
# Seen on 2026-11-28, sync and asyncio client alike. No server is needed: the options are read as the channel is opened.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet 'tritonclient[grpc]==2.73.0'
"$folder/venv/bin/python" - <<'PYTHON'
import asyncio
import sys
from importlib.metadata import version

import grpc
import tritonclient.grpc
import tritonclient.grpc.aio

SIZES = {"grpc.max_send_message_length", "grpc.max_receive_message_length"}
seen = []


def noting(open_channel):
    def opened(*arguments, options=(), **more):
        seen.append(sorted(SIZES & {name for name, _ in options}))
        return open_channel(*arguments, options=options, **more)

    return opened


grpc.insecure_channel = noting(grpc.insecure_channel)
grpc.aio.insecure_channel = noting(grpc.aio.insecure_channel)


async def opened(client, **more):
    client.InferenceServerClient("127.0.0.1:1", **more)


for client in (tritonclient.grpc, tritonclient.grpc.aio):
    for more in ({}, {"channel_args": [("grpc.keepalive_time_ms", 60000)]}):
        asyncio.run(opened(client, **more))
print(f"tritonclient {version('tritonclient')}: options about sizes, by call: {seen}")
if seen != [sorted(SIZES), [], sorted(SIZES), []]:
    sys.exit("The behaviour has changed.")
PYTHON
