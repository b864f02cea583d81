package main

import (
	"encoding/json"
	"fmt"
	"net/http"
	"strings"
)

const (
	chunkHead = `data: {"id":"chatcmpl-0123456789abcdef","object":"chat.completion.chunk","created":1700000000,"model":"tiny","choices":[{"index":0,"delta":`
	chunkTail = `,"logprobs":null,"finish_reason":%s}]}` + "\n\n"
)

type chat struct {
	Stream    bool `json:"stream"`
	MaxTokens int  `json:"max_tokens"`
	// What routers that know the newer name make of it.
	MaxCompletionTokens int `json:"max_completion_tokens"`
}

// handler serves chats as engines do, and what routers ask before they trust a backend.
func handler(e *engine) http.Handler {
	mux := http.NewServeMux()
	mux.HandleFunc("POST /v1/chat/completions", func(w http.ResponseWriter, r *http.Request) {
		var asked chat
		if err := json.NewDecoder(r.Body).Decode(&asked); err != nil {
			http.Error(w, err.Error(), http.StatusBadRequest)
			return
		}
		asked.MaxTokens = max(asked.MaxTokens, asked.MaxCompletionTokens)
		tokens := make(chan bool, asked.MaxTokens)
		e.add(&request{left: asked.MaxTokens, emit: func(isLast bool) { tokens <- isLast }})
		if asked.Stream {
			stream(w, tokens)
		} else {
			whole(w, tokens, asked.MaxTokens)
		}
	})
	answers := map[string]string{
		"/health":          `{"status":"ok"}`,
		"/v1/models":       `{"object":"list","data":[{"id":"tiny","object":"model","created":1700000000,"owned_by":"bench"}]}`,
		"/get_model_info":  `{"model_path":"tiny","is_generation":true}`,
		"/model_info":      `{"model_path":"tiny","is_generation":true}`,
		"/get_server_info": `{"model_path":"tiny","dp_size":1}`,
		"/server_info":     `{"model_path":"tiny","dp_size":1}`,
		"/health_generate": `{"status":"ok"}`,
		"/metrics":         ``,
	}
	for path, body := range answers {
		mux.HandleFunc("GET "+path, func(w http.ResponseWriter, _ *http.Request) {
			w.Header().Set("content-type", "application/json")
			fmt.Fprint(w, body)
		})
	}
	return mux
}

// stream writes one chunk a token, each in a write of its own.
func stream(w http.ResponseWriter, tokens <-chan bool) {
	w.Header().Set("content-type", "text/event-stream; charset=utf-8")
	flusher := w.(http.Flusher)
	fmt.Fprint(w, chunkHead+`{"role":"assistant","content":""}`+fmt.Sprintf(chunkTail, "null"))
	chunk := []byte(chunkHead + `{"content":"` + tokenText + `"}` + fmt.Sprintf(chunkTail, "null"))
	for {
		isLast := <-tokens
		if _, err := w.Write(chunk); err != nil {
			return
		}
		if isLast {
			fmt.Fprint(w, chunkHead+`{}`+fmt.Sprintf(chunkTail, `"length"`)+"data: [DONE]\n\n")
			return
		}
		flusher.Flush()
	}
}

func whole(w http.ResponseWriter, tokens <-chan bool, num int) {
	for !<-tokens {
	}
	body := `{"id":"chatcmpl-0123456789abcdef","object":"chat.completion","created":1700000000,"model":"tiny","choices":[{"index":0,` +
		`"message":{"role":"assistant","content":"` + strings.Repeat(tokenText, num) + `"},"logprobs":null,"finish_reason":"length"}],` +
		fmt.Sprintf(`"usage":{"prompt_tokens":30,"completion_tokens":%d,"total_tokens":%d}}`, num, 30+num)
	w.Header().Set("content-type", "application/json")
	fmt.Fprint(w, body)
}
