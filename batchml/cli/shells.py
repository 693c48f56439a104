"""The scripts that `batchml completion SHELL` prints. Each asks `batchml __complete WORD...`."""

BASH = r"""# batchml: completion for bash. In ~/.bashrc: eval "$(batchml completion bash)"
_batchml() {
    local line="${COMP_LINE:0:COMP_POINT}" word about
    local -a words=()
    # Split by spaces alone: bash would split --env=dev and RUN:3, too.
    read -ra words <<< "$line"
    [[ "$line" == *[[:space:]] ]] && words+=("")
    local now="${words[${#words[@]}-1]}"
    # What bash takes for the beginning of the word stays as it is.
    local kept="${now%"${now##*[:=]}"}"
    COMPREPLY=()
    while IFS=$'\t' read -r word about; do
        if [[ "$word" == :files ]]; then
            compopt -o default
        else
            COMPREPLY+=("${word#"$kept"}")
            [[ "$word" == *= ]] && compopt -o nospace
        fi
    done < <(command "${words[0]}" __complete "${words[@]:1}" 2>/dev/null)
}
complete -o nosort -F _batchml batchml
"""

ZSH = r"""#compdef batchml
# batchml: completion for zsh. In ~/.zshrc, after compinit: eval "$(batchml completion zsh)"
_batchml() {
    local line word about files=0
    local -a plain plain_about open open_about
    for line in "${(@f)$(command $words[1] __complete "${(@)words[2,CURRENT]}" 2>/dev/null)}"; do
        [[ -z $line ]] && continue
        if [[ $line == :files ]]; then files=1; continue; fi
        word=${line%%$'\t'*}
        about=${line#*$'\t'}
        if [[ $word == *= ]]; then
            open+=("$word"); open_about+=("$word${about:+  -- $about}")
        else
            plain+=("$word"); plain_about+=("$word${about:+  -- $about}")
        fi
    done
    (( $#plain )) && compadd -V batchml -l -d plain_about -a plain
    (( $#open )) && compadd -V batchml -S '' -l -d open_about -a open
    (( files )) && _files
}
if [[ $funcstack[1] == _batchml ]]; then _batchml "$@"; else compdef _batchml batchml; fi
"""

FISH = r"""# batchml: completion for fish.
# batchml completion fish > ~/.config/fish/completions/batchml.fish
function __batchml_complete
    set -l words (commandline -opc) (commandline -ct)
    set -l answer (command $words[1] __complete $words[2..-1] 2>/dev/null)
    if test "$answer[1]" = :files
        set -e answer[1]
        __fish_complete_path (commandline -ct)
    end
    string join \n -- $answer
end
complete -c batchml -f -k -a '(__batchml_complete)'
"""

SCRIPTS = {"bash": BASH, "zsh": ZSH, "fish": FISH}
