"""What pdsh runs on a node: start the node's ranks of a job through its agent, wait for them, end with their status.

python -S -E enter.py FOLDER JOB
"""

import json
import socket
import sys

folder, job = sys.argv[1:]
with open(f"{folder}/job-{job}.json", encoding="utf-8") as file:
    told = json.load(file)
node = socket.gethostname()
ranks = [rank for rank, host in enumerate(told["hosts"]) if host == node]
request = {"job": told["job"], "ranks": ranks, "environment": told["environment"], "arguments": told["arguments"]}
agent = socket.socket(socket.AF_UNIX)
agent.connect(f"{folder}/{node}.sock")
socket.send_fds(agent, [json.dumps(request).encode()], [1, 2])
answer = b""
while data := agent.recv(65536):
    answer += data
# Nothing: the agent has gone, and the ranks with it
sys.exit(next((status for status in json.loads(answer) if status), 0) if answer else 255)
