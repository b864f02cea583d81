package main

import (
	"io"
	"sync"

	"google.golang.org/grpc"

	"naru.dev/bench-router/wire"
)

// The service that Naru's routers speak to; all but Exchange and Describe is unimplemented.
type worker struct {
	wire.UnimplementedWorkerServer
	engine *engine
}

// One stream: collects the deltas of a step and sends them as one frame.
type exchange struct {
	mutex  sync.Mutex
	deltas []*wire.Delta
	alive  int32
	frames chan *wire.WorkerFrame
}

func (w *worker) Exchange(stream grpc.BidiStreamingServer[wire.RouterFrame, wire.WorkerFrame]) error {
	x := &exchange{frames: make(chan *wire.WorkerFrame, 65536)}
	w.engine.afterStep(x.flush)
	go func() {
		for frame := range x.frames {
			if stream.Send(frame) != nil {
				return
			}
		}
	}()
	for {
		frame, err := stream.Recv()
		if err == io.EOF {
			return nil
		}
		if err != nil {
			return err
		}
		for _, request := range frame.Generate {
			x.start(w.engine, request)
		}
	}
}

func (x *exchange) start(e *engine, asked *wire.GenerateRequest) {
	numTokens := int(asked.GetSampling().GetMaxTokens())
	id := asked.GetRequestId()
	number := int32(0)
	x.mutex.Lock()
	x.alive++
	x.mutex.Unlock()
	e.add(&request{left: numTokens, emit: func(isLast bool) {
		number++
		delta := &wire.Delta{RequestId: id, Text: tokenText, NumTokens: 1, TokenIds: []int32{1000 + number}}
		if number == 1 {
			delta.Revision = "fake"
		}
		if isLast {
			delta.FinishReason = wire.FinishReason_FINISH_REASON_LENGTH
			delta.Usage = &wire.Usage{PromptTokens: 30, CompletionTokens: number}
			delta.RequestDone = true
		}
		x.mutex.Lock()
		x.deltas = append(x.deltas, delta)
		if isLast {
			x.alive--
		}
		x.mutex.Unlock()
	}})
}

func (x *exchange) flush() {
	x.mutex.Lock()
	deltas, alive := x.deltas, x.alive
	x.deltas = nil
	x.mutex.Unlock()
	if len(deltas) > 0 {
		x.frames <- &wire.WorkerFrame{Epoch: "e1", Deltas: deltas, Load: &wire.Load{NumRunning: alive, KvUsage: 0.5}}
	}
}
