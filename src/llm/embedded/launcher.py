"""Runs llama.cpp's OpenAI-compatible server from the `xllamacpp` package, for one dinsql process.

Started by dinsql's guard process. Everything comes in as arguments except the API key, which comes in the
environment so that no process list shows it. Standard input is a pipe held by the guard: when it closes, nobody is
left to use the server and it ends at once, also with a request in flight.
"""

import argparse
import os
import signal
import sys
import threading


def arguments():
    parser = argparse.ArgumentParser()
    parser.add_argument("--packages", help="folder to import xllamacpp from, where there is no virtual environment")
    parser.add_argument("--model", required=True)
    parser.add_argument("--alias", required=True)
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--slots", type=int, required=True)
    parser.add_argument("--context-per-slot", type=int, required=True)
    parser.add_argument("--threads", type=int, required=True)
    parser.add_argument("--cache-ram", type=int, required=True, help="MiB of prompts kept beside the slots")
    return parser.parse_args()


def end_with_guard():
    while os.read(0, 4096):
        pass
    os._exit(0)


def main():
    options = arguments()
    # `_exit`, since a server with a request in flight would otherwise hold the process for minutes.
    signal.signal(signal.SIGTERM, lambda *_: os._exit(0))
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=end_with_guard, daemon=True).start()
    key = os.environ.pop("LLAMA_API_KEY")
    if options.packages:
        sys.path.insert(0, options.packages)
    import xllamacpp

    params = xllamacpp.CommonParams()
    params.model.path = options.model
    params.model_alias = {options.alias}
    params.hostnames = ["127.0.0.1"]
    params.port = options.port
    params.api_keys = [key]
    params.n_parallel = options.slots
    params.n_ctx = options.slots * options.context_per_slot
    params.cpuparams.n_threads = options.threads
    params.cpuparams_batch.n_threads = options.threads
    params.endpoint_metrics = True
    params.ui = False
    # The context asked for is the context wanted: no silent shrinking to the memory that happens to be free.
    params.fit_params = False
    # Re-use of a common prefix only. Re-use of later chunks (`n_cache_reuse`) shifts old keys to new positions, so
    # that an answer would depend on what was asked before; a prompt cut to fit (`ctx_shift`) would be worse still.
    params.cache_prompt = True
    params.n_cache_reuse = 0
    params.ctx_shift = False
    params.cache_ram_mib = options.cache_ram
    try:
        server = xllamacpp.Server(params)
    except RuntimeError as error:
        # llama.cpp's own lines above say why; a traceback would only push them out of sight.
        sys.exit(f"no server: {error}")
    print("listening on", server.listening_address, flush=True)
    threading.Event().wait()


if __name__ == "__main__":
    main()
