"""The HTTP service of ``mas-gym serve``, and the telemetry shared with other commands.

`mas_gym.service.app` holds the routes, `wire` the OpenAI format, `pool` the searches, `server` the HTTP server.
They need ``pip install 'mas-gym[serve]'``; `telemetry` does not.
"""
