#!/usr/bin/env bash
# Calibrate a model on your own prompts, and give its servers the profile through their store:
#
#     examples/calibrate.sh MODEL prompts.jsonl http://STORE:8700 [MORE OPTIONS OF kvfetch calibrate]
#
# Prompts are lines {"prompt": TEXT}, as the model gets them, about 40,000 tokens in all. A token of the store that may
# write goes into the environment, as KVFETCH_TOKEN. Servers that start with {"store": STORE, "quantiser": "klt"} take
# the profile; those that run already go on as before.
set -euo pipefail
model=$1 prompts=$2 store=$3
shift 3
kvfetch calibrate --model "$model" --text "$prompts" --publish "$store" "$@"
kvfetch profile list "$store"
