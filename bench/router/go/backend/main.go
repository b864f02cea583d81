// A worker that computes nothing: the protocol of Naru's workers and OpenAI's HTTP over one engine of fixed pace.
//
// Both edges get their tokens from the same steps, so that a router which speaks to the one is fed exactly as a router
// which speaks to the other. Prints one line with both addresses when it serves.
package main

import (
	"flag"
	"fmt"
	"log"
	"net"
	"net/http"
	"time"

	"google.golang.org/grpc"

	"naru.dev/bench-router/wire"
)

func main() {
	step := flag.Duration("step", 250*time.Microsecond, "time of an engine step: one token for each running request")
	flag.Parse()
	engine := newEngine(*step)
	go engine.run()

	grpcListener := listen()
	httpListener := listen()
	server := grpc.NewServer(grpc.MaxRecvMsgSize(64<<20), grpc.MaxSendMsgSize(64<<20))
	wire.RegisterWorkerServer(server, &worker{engine: engine})
	go func() { log.Fatal(server.Serve(grpcListener)) }()
	fmt.Printf("backend ready: grpc %s http %s\n", grpcListener.Addr(), httpListener.Addr())
	log.Fatal(http.Serve(httpListener, handler(engine)))
}

func listen() net.Listener {
	listener, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		log.Fatal(err)
	}
	return listener
}
