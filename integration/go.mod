module example.com/lb/integration

go 1.26

require (
	example.com/lb v0.0.0
	github.com/coder/websocket v1.8.15
	github.com/gorilla/websocket v1.5.3
)

replace example.com/lb => ../
