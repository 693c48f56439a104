"""What tests do in JupyterLab's page and on a terminal, and how long they wait for it."""

import json
import os
import re
import time
from collections.abc import Callable
from typing import Any

from tests.support.browser import Page

LIMIT = 60.0  # seconds for what takes a few, on a machine that is busy

# In the page, as JupyterLab does it: a kernel in its top folder over REST, code over a websocket.
_RUN_CODE = """(async (token, code) => {
  const about = {method: 'POST', headers: {'Authorization': 'token ' + token},
                 body: JSON.stringify({name: 'python3', path: ''})};
  const kernel = await (await fetch('/api/kernels', about)).json();
  const socket = new WebSocket(`ws://${location.host}/api/kernels/${kernel.id}/channels`);
  await new Promise((good, bad) => { socket.onopen = good; socket.onerror = bad; });
  const id = crypto.randomUUID();
  const heard = new Promise(good => {
    let text = '';
    socket.onmessage = event => {
      const message = JSON.parse(event.data);
      if (message.parent_header.msg_id !== id) return;
      if (message.msg_type === 'stream') text += message.content.text;
      if (message.msg_type === 'error') text += message.content.evalue;
      if (message.msg_type === 'status' && message.content.execution_state === 'idle') good(text);
    };
  });
  const content = {code, silent: false, store_history: false, user_expressions: {},
                   allow_stdin: false};
  const header = {msg_id: id, msg_type: 'execute_request', username: '', session: id,
                  date: new Date().toISOString(), version: '5.3'};
  socket.send(JSON.stringify({header, parent_header: {}, metadata: {}, content,
                              channel: 'shell', buffers: []}));
  return await heard;
})"""


def run_cell(page: Page, token: str, code: str) -> str:
    """Run code in a kernel of its own; what it printed, and what went wrong."""
    printed: str = page.evaluate(f"({_RUN_CODE})({json.dumps(token)}, {json.dumps(code)})")
    return printed


def until(page: Page, look: str, good: Callable[[Any], bool]) -> Any:
    """What a page's script says of it once that is `good`."""
    end = time.monotonic() + LIMIT
    while True:
        found = page.evaluate(look)
        if good(found):
            return found
        assert time.monotonic() < end, found
        time.sleep(0.2)


def shown_until(leader: int, pattern: str) -> str:
    """What a terminal shows, until it shows what matches; to its end for a pattern of nothing."""
    seen = b""
    while not pattern or not re.search(pattern, seen.decode(errors="replace")):
        try:
            seen += os.read(leader, 65536)
        except OSError:  # whoever had it open has ended
            break
    return seen.decode(errors="replace")
