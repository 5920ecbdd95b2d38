"""The HTTP service behind ``mas-gym serve``, and the telemetry that it shares with the other commands.

`mas_gym.service.app` holds the routes, `wire` the OpenAI format, `pool` the searches, `server` the HTTP server.
They need ``pip install 'mas-gym[serve]'``; `telemetry` does not.
"""
