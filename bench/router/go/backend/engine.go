package main

import (
	"log"
	"os"
	"sync"
	"time"

	"golang.org/x/sys/unix"
)

// The text of every token. The load generator counts tildes, which stand nowhere else in an answer.
const tokenText = " ~tok"

// A request that runs: each step gives it one token.
type request struct {
	left int
	// emit takes one token; it must not block.
	emit func(isLast bool)
}

// One token for each running request a step. A request that finds the engine idle gets its first one at once.
type engine struct {
	step    time.Duration
	mutex   sync.Mutex
	running []*request
	wake    chan struct{}
	// Called after the tokens of a step are out.
	onStep []func()
}

func newEngine(step time.Duration) *engine {
	return &engine{step: step, wake: make(chan struct{}, 1)}
}

func (e *engine) add(r *request) {
	e.mutex.Lock()
	e.running = append(e.running, r)
	e.mutex.Unlock()
	select {
	case e.wake <- struct{}{}:
	default:
	}
}

func (e *engine) afterStep(call func()) {
	e.mutex.Lock()
	e.onStep = append(e.onStep, call)
	e.mutex.Unlock()
}

// run never returns. Go's own timers wake at whole milliseconds when nothing else happens; this one does not.
func (e *engine) run() {
	timer := newTimer(e.step)
	for {
		if e.tick() > 0 {
			timer.wait()
			continue
		}
		<-e.wake
		timer.restart()
	}
}

// tick gives out the tokens of one step; how many requests want another one.
func (e *engine) tick() int {
	e.mutex.Lock()
	defer e.mutex.Unlock()
	kept := e.running[:0]
	num := len(e.running)
	for _, r := range e.running {
		r.left--
		r.emit(r.left <= 0)
		if r.left > 0 {
			kept = append(kept, r)
		}
	}
	for i := len(kept); i < num; i++ {
		e.running[i] = nil
	}
	e.running = kept
	if num > 0 {
		for _, call := range e.onStep {
			call()
		}
	}
	return len(kept)
}

type timer struct {
	file   *os.File
	fd     int
	period time.Duration
	buffer [8]byte
}

func newTimer(period time.Duration) *timer {
	fd, err := unix.TimerfdCreate(unix.CLOCK_MONOTONIC, unix.TFD_NONBLOCK|unix.TFD_CLOEXEC)
	if err != nil {
		log.Fatal(err)
	}
	t := &timer{file: os.NewFile(uintptr(fd), "timer"), fd: fd, period: period}
	t.restart()
	return t
}

func (t *timer) restart() {
	spec := unix.NsecToTimespec(t.period.Nanoseconds())
	if err := unix.TimerfdSettime(t.fd, 0, &unix.ItimerSpec{Interval: spec, Value: spec}, nil); err != nil {
		log.Fatal(err)
	}
}

func (t *timer) wait() {
	if _, err := t.file.Read(t.buffer[:]); err != nil {
		log.Fatal(err)
	}
}
