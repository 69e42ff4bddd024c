"""Ask two questions about one long document, with OpenAI's client, and print what came from a cache.

    python examples/openai_client.py http://127.0.0.1:30000/v1 DOCUMENT

The document comes first and the question last, because only equal beginnings are shared. So the second question finds
the document in the server's memory. Restart the server and run this again: the first one finds it in the store.
`cached_tokens` counts both, and needs the server's --enable-cache-report.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path

from openai import OpenAI, OpenAIError

QUESTIONS = ("What is this text about? One sentence.", "Which word in it is the longest?")


def main(url: str, document: str) -> None:
    client = OpenAI(base_url=url, api_key="none")  # or the server's --api-key
    model = client.models.list().data[0].id
    for question in QUESTIONS:
        started, first_token_s, usage = time.monotonic(), 0.0, None
        stream = client.chat.completions.create(
            model=model,
            messages=[{"role": "system", "content": document}, {"role": "user", "content": question}],
            max_tokens=32,
            stream=True,
            stream_options={"include_usage": True},
            # For tenants that must not share: extra_body={"cache_salt": "tenant 17"}
        )
        for chunk in stream:
            if chunk.choices and chunk.choices[0].delta.content and not first_token_s:
                first_token_s = time.monotonic() - started
            usage = chunk.usage or usage
        details = usage.prompt_tokens_details if usage else None
        print(
            f"{question}  prompt_tokens {usage.prompt_tokens if usage else 0}, "
            f"cached_tokens {details.cached_tokens if details else 0}, first token after {first_token_s:.2f} s"
        )


if __name__ == "__main__":
    if len(sys.argv) != 3:
        sys.exit(__doc__)
    try:
        main(sys.argv[1], Path(sys.argv[2]).read_text())
    except (OSError, OpenAIError) as e:
        sys.exit(f"openai_client.py: {sys.argv[1]}, {sys.argv[2]}: {e}")
